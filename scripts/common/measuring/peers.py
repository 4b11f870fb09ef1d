"""Train Hugging Face's Llama as a good engineer would, with the data and options of the four versions.

    python peers.py --preset small --use-amp --enable-torch-compile
    python peers.py --preset small --use-amp --enable-torch-compile --fp8 --fp8-recipe rowwise
    python peers.py --library liger --preset small --use-amp
    python peers.py --liger-loss --preset small --use-amp --enable-torch-compile --vocab-size 32000
    python peers.py --packed --master-weights --compile-optimizer --use-amp --enable-torch-compile

Attention is the fused causal kernel without a mask tensor, AdamW is PyTorch's fused one, and the step runs in a graph.
With --library liger, Liger's kernels are those for RMSNorm, RoPE and SwiGLU. --liger-loss computes output head and loss
in chunks, with Liger's fused linear cross-entropy. Its chunks are small; --liger-chunk asks for larger ones.

Further options build a faster stack from libraries. --master-weights computes with 16-bit weights, and AdamW updates
float32 masters. --compile-optimizer compiles that update. --packed computes q, k and v in one GEMM, gate and up in
another. --attention-backend chooses SDPA's kernel. --compile-blocks compiles each layer separately.

This is version 1's script with a library's model, loss and optimizer. Weights, batches, options, the timed step, the
graph, the printed summary and the metrics file are version 1's, so you can compare the numbers.
Exit status: as version 1's; 2 also if the library isn't installed.
"""

import contextlib
import importlib
import pathlib
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import sdpa_kernel
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from common.versions import SCRIPTS, load_file, load_version

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


class KnownCount(TorchFunctionMode):
    """Answer Tensor.item() with a number that the host knows, instead of reading it back from the GPU."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.item:
            return self.count
        return function(*args, **(kwargs or {}))


class LigerLoss(torch.autograd.Function):
    """Compute the mean cross-entropy of x [rows, C] and w [V, C], and its gradients, by Liger in chunks of rows.

    Liger's own Function cannot be captured in a graph, because it reads two values back from the GPU: the number of
    labels that are not ignored, which are all of them here, and in the backward whether the loss was scaled.
    """

    @staticmethod
    def forward(ctx, x, w, labels, chunk):
        from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

        how = {"accum_dtype": torch.float32}
        if chunk:  # Liger computes in V / (chunk_mem_const · C) chunks
            rows, C = x.shape
            chunks = -(-rows // chunk)
            how["chunk_mem_const"] = -(-w.shape[0] // (chunks * C))
        with KnownCount(labels.numel()), torch.autocast(x.device.type, enabled=False):
            loss, *_, dx, dw, _ = fused_linear_cross_entropy_forward(x, w, labels, **how)
        ctx.save_for_backward(dx, dw)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        return *ctx.saved_tensors, None, None  # dloss is 1: only float16 scales the loss, which is refused


class PackedAttention(nn.Module):
    """Replace the library's attention by one whose q, k and v come from one GEMM."""

    def __init__(self, attention):
        super().__init__()
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.sizes = [projection.out_features for projection in projections]
        self.head_dim = attention.head_dim
        self.qkv_proj = nn.Linear(projections[0].in_features, sum(self.sizes), bias=False)
        self.o_proj = attention.o_proj

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **options):
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        q, k, v = self.qkv_proj(hidden_states).split(self.sizes, dim=-1)
        q = q.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, H, T, D]
        k = k.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, K, T, D]
        v = v.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, K, T, D]
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        context, _ = causal_attention(self, q, k, v, attention_mask)  # [B, T, H, D]
        return self.o_proj(context.flatten(-2)), None


class PackedFeedForward(nn.Module):
    """Replace the library's SwiGLU by one whose gate and up come from one GEMM."""

    def __init__(self, mlp):
        super().__init__()
        width, C = mlp.gate_proj.weight.shape
        self.gate_up_proj = nn.Linear(C, 2 * width, bias=False)
        self.down_proj = mlp.down_proj

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


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
        if options.packed:
            for layer in self.layers:
                layer.self_attn = PackedAttention(layer.self_attn)
                layer.mlp = PackedFeedForward(layer.mlp)
        if options.fp8:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            recipe = Float8LinearConfig.from_recipe_name(options.fp8_recipe)
            convert_to_float8_training(self.llama.model, config=recipe)  # not the head, as in version 3
        self.dtype = options.dtype if options.use_amp else torch.float32
        self.liger_loss = options.liger_loss
        self.liger_chunk = options.liger_chunk
        if options.enable_torch_compile:
            whole = self.llama.model if self.liger_loss else self
            by_blocks = options.compile_blocks or options.parallel  # then DDP sends gradients during the backward
            for module in self.layers if by_blocks else [whole]:
                module.compile(mode=options.compile_mode)

    @property
    def layers(self):
        return self.llama.model.layers

    def named_parameters(self, *args, **kwargs):
        for name, parameter in super().named_parameters(*args, **kwargs):
            parts = name.removeprefix("llama.model.").split(".")
            yield ".".join(CANONICAL.get(part, part) for part in parts), parameter

    def forward(self, tokens, labels):
        if self.liger_loss:
            x = self.llama.model(input_ids=tokens, use_cache=False).last_hidden_state  # [B, T, C]
            x = x.flatten(0, 1).to(self.dtype)  # [rows, C]
            w = self.llama.lm_head.weight.to(self.dtype)  # once, not for each chunk
            return LigerLoss.apply(x, w, labels.flatten(), self.liger_chunk)
        # Labels are the next tokens already: shift_labels tells the library's loss not to shift them once more.
        return self.llama(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss


def compute_loss(model, tokens, labels, options):
    """Return the mean cross-entropy of predicting labels [B, T] from tokens [B, T], computed by the library."""
    backend = load_version(4).SDPA_BACKENDS.get(options.attention_backend)
    chosen = sdpa_kernel(backend) if backend else contextlib.nullcontext()
    converts = options.use_amp and not options.master_weights
    with chosen, torch.autocast(tokens.device.type, options.dtype, enabled=converts):
        return model(tokens, labels)


def make_optimizer(model, options):
    """Return PyTorch's fused AdamW, or version 4's, which is PyTorch's update on float32 masters."""
    if options.master_weights:
        made = load_version(4).MasterAdamW
        optimizer = made(model.parameters(), options.learning_rate, options.dtype, options.compile_optimizer)
        for p in model.parameters():  # the optimizer leaves norms in float32, but the library doesn't convert them
            p.data = p.data.to(options.dtype)
        return optimizer
    graph = options.graph and options.on_gpu
    return torch.optim.AdamW(model.parameters(), lr=options.learning_rate, capturable=graph, fused=True)


def add_version_options(add):
    add("--library", choices=PACKAGES, default="transformers", help="library whose model is trained (%(default)s)")
    add("--liger-loss", action="store_true", help="output head and loss by Liger's fused linear cross-entropy")
    add("--liger-chunk", type=int, metavar="ROWS", help="rows of its chunks (Liger's choice: few)")
    masters = "16-bit weights and float32 masters, not autocast; with --use-amp"
    add("--master-weights", action="store_true", help=masters)
    add("--packed", action="store_true", help="one GEMM for q, k and v, and one for gate and up")
    backends = ["auto", *load_version(4).SDPA_BACKENDS]
    add("--attention-backend", choices=backends, default="auto", help="SDPA's kernel (auto: PyTorch's choice)")
    add("--enable-torch-compile", action="store_true", help="compile model and loss, without Liger's")
    modes = ["default", "max-autotune-no-cudagraphs"]
    add("--compile-mode", choices=modes, default="default", help="used by --enable-torch-compile (%(default)s)")
    blocks = "compile each layer separately, with --enable-torch-compile (always under torchrun)"
    add("--compile-blocks", action="store_true", help=blocks)
    add("--compile-optimizer", action="store_true", help="compile the update of --master-weights too")
    add("--fp8", action="store_true", help="torchao's float8 linear layers, with --use-amp")
    add("--fp8-recipe", choices=FP8_RECIPES, default="tensorwise", help="torchao's, used by --fp8 (%(default)s)")


def refuse_combinations(options, user_error):
    for option, given in {
        "--fp8": options.fp8,
        "--library liger": options.library == "liger",
        "--liger-loss": options.liger_loss,
    }.items():
        if given and not options.on_gpu:
            raise user_error(f"{option} needs a GPU, got {options.device}")
    if options.liger_loss and options.use_amp and options.amp_dtype == "float16":
        raise user_error("--liger-loss needs --amp-dtype bfloat16, whose loss isn't scaled, got float16")
    if options.liger_chunk is not None and not (options.liger_loss and options.liger_chunk > 0):
        raise user_error(f"--liger-chunk needs --liger-loss and at least one row, got {options.liger_chunk}")
    if options.fp8 and not options.use_amp:
        raise user_error("--fp8 needs --use-amp: the other operations run in 16 bits")
    if options.master_weights and not options.use_amp:
        raise user_error("--master-weights needs --use-amp: it sets the weights' dtype")
    if options.master_weights and options.parallel == "fsdp":
        raise user_error("--master-weights doesn't work with --parallel fsdp, which shards float32 weights")
    if options.compile_optimizer and not options.master_weights:
        raise user_error("--compile-optimizer needs --master-weights: PyTorch's fused AdamW is one kernel already")
    if options.compile_blocks and not options.enable_torch_compile:
        raise user_error("--compile-blocks needs --enable-torch-compile")
    if options.packed and options.library == "liger":
        raise user_error("--packed needs --library transformers: Liger's SwiGLU has two weights")
    backend = options.attention_backend
    if backend != "auto" and not load_version(4).can_run(backend, options):
        raise user_error(f"--attention-backend {backend} cannot run this model in {options.precision}: use auto")


def import_packages(options, user_error):
    """Import what the options need; return the packages' names and versions."""
    names = []
    packages = [*PACKAGES[options.library]]
    if options.liger_loss:
        packages.append("liger_kernel.ops.fused_linear_cross_entropy")
    if options.fp8:
        packages.append("torchao")
    for package in packages:
        name = package.split(".")[0]
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise user_error(f"{name.replace('_', '-')} cannot be imported ({error}): install it") from None
        names.append(f"{name} {getattr(sys.modules[name], '__version__', '')}".strip())
    return names


def complete_version_options(options, user_error):
    """Check these options and import the packages; return parts: what the peer uses, in words."""
    refuse_combinations(options, user_error)
    names = import_packages(options, user_error)
    backend = options.attention_backend
    parts = [f"{' with '.join(names)}: causal SDPA" + (f" ({backend})" if backend != "auto" else "")]
    if options.packed:
        parts.append("packed projections")
    if options.master_weights:
        parts.append(f"{options.amp_dtype} weights with float32 masters")
    parts.append("compiled AdamW" if options.compile_optimizer else "fused AdamW")
    if options.enable_torch_compile:
        by_layer = ", layer by layer" if options.compile_blocks else ""
        parts.append(f"torch.compile ({options.compile_mode}{by_layer})")
    if options.fp8:
        parts.append(f"fp8 ({options.fp8_recipe})")
    if options.liger_loss:
        by_rows = f", {options.liger_chunk} rows a chunk" if options.liger_chunk else ""
        parts.append(f"fused linear cross-entropy{by_rows}")
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
    script.get_weight, script.set_weight = load_version(4).get_weight, load_version(4).set_weight
    script.add_version_options = add_version_options
    script.complete_version_options = lambda options: complete_version_options(options, script.UserError)
    return script


if __name__ == "__main__":
    sys.exit(peer_script().main())
